"""What forks, CUDA graphs, tracers and Triton's interpreter ask of code that runs beside them."""
