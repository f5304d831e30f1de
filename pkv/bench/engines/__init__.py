"""What decodes in a benchmark: pkv, FlashInfer, torch, the Triton kernels of servers, and a plain read."""
