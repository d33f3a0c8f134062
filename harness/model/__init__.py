"""What exists, what is asked, what is recorded: frozen values with strict parsing at the edge."""
