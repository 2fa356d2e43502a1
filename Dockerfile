# dflow on a CPU, or with another base image on NVIDIA GPUs:
#     docker build -t dflow .
#     docker build -t dflow --build-arg BASE=nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04 --build-arg EXTRAS=sglang .
#     docker run --rm -v "$PWD:/work" -v dflow-home:/home/dflow dflow run /opt/dflow/pipelines/tiny.toml
# A pipeline, its data and the store lie in /work, which user 1000 must be able to write; what you trust lies in dflow-home.
# `--gpus all --ipc=host` gives the second image its GPUs.
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG EXTRAS=""

# A compiler, with which the loss on CPUs and torch's kernels are compiled; Python, where the base has none.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev $(command -v python3 >/dev/null || echo python3 python3-venv python3-dev) \
    && rm -rf /var/lib/apt/lists/*

COPY . /opt/dflow
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir -c /opt/dflow/constraints.txt --editable "/opt/dflow${EXTRAS:+[$EXTRAS]}"

# Not root: a store belongs to whoever made it.
RUN useradd --create-home dflow && mkdir /work && chown dflow /work
USER dflow
WORKDIR /work
ENV PATH=/opt/venv/bin:$PATH
ENTRYPOINT ["dflow"]
CMD ["--help"]
