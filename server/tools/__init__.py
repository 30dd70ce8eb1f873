"""Tool calls in a model's text: sans-I/O, between the text that tokens make and the events that an API shows."""
