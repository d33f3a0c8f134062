"""Decisions about requests and layouts: what runs where, and what moves. Pure."""
