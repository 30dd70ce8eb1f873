"""The server process: owns sockets, time and policy. Of engine/ it sees wire, client, tokenizer and text only."""
