"""Optical circuit switches (OCS), one module a family."""
