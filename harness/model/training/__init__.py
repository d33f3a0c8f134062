"""What a training step is, before anybody takes it: for ranks of a bench and for simulated ones."""
