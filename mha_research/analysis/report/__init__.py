"""What a person sees of a finished sweep: tables, figures, sentences and the page."""
