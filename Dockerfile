# vembed in a container.
#   docker build --tag vembed .                              for NVIDIA GPUs
#   docker build --tag vembed:cpu --build-arg DEVICE=cpu .   without CUDA's libraries, several GB smaller
#   docker run --rm --gpus all --ipc=host --volume "$PWD:/work" vembed train cfg.yaml
# --ipc=host: the processes of a run exchange data over shared memory, of which containers have 64 MB by default.
FROM python:3.11-slim

ARG DEVICE=cuda

# A C compiler for Triton's kernels, git for the Hub.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ git \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv

WORKDIR /opt/vembed
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY vembed vembed
# The usual wheels of torch on Linux bring CUDA's libraries.
RUN case "$DEVICE" in \
      cuda) uv pip install --system --no-cache --constraint constraints.txt . ;; \
      cpu) uv pip install --system --no-cache --constraint constraints.txt --torch-backend=cpu . ;; \
      *) echo "DEVICE is $DEVICE; give cuda or cpu" >&2; exit 2 ;; \
    esac

WORKDIR /work
ENTRYPOINT ["vembed"]
CMD ["--help"]
