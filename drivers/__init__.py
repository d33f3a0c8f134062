"""How to speak to a switch: usable alone, from a prompt, without the harness."""
