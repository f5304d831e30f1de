# The course without a GPU, also on macOS and Windows, where Triton has no wheel.
#
#   docker build -t pkv --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#   docker run --rm -p 127.0.0.1:8888:8888 pkv             then open the address that it prints
FROM python:3.11-slim

# g++ is Triton's, for cross-compiling and for a GPU; make and git are the course's.
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ git make \
 && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home learner
USER learner
WORKDIR /home/learner/pkv

# Empty takes pip's own choice, on x86 the CUDA build of torch: several gigabytes.
ARG TORCH_INDEX=
COPY --chown=learner . .
RUN make setup TORCH_INDEX="$TORCH_INDEX"

EXPOSE 8888
CMD ["make", "lab", "ARGS=--ip=0.0.0.0 --port=8888 --no-browser"]
