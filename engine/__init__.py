"""Sluice's engine: token ids in, token ids out.

May import: numpy, torch (never through wire, client, tokenizer or text, which the server process uses).
Never imports server/ or protocols/.
"""
