"""Consumers of documents: journal, store, summary, report."""
