"""Wire languages of devices, as pure codecs: bytes in, frames out, no I/O and no clock."""
