"""The API families: validated requests in, streams in a grammar of their own out."""
