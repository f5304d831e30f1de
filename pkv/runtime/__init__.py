"""Support for forks, CUDA graphs, torch's tracers and Triton's interpreter, and memory beside plans and caches."""
