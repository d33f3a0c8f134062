"""The protocol between coordinator and agents."""
