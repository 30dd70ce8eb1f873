"""Model code: what a checkpoint says of itself (`config`) and the decoder that computes it (`llama`)."""
