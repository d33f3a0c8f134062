"""Lines to devices: bytes with deadlines. Foreign exceptions end here, as `drivers.errors`."""
