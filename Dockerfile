# make wheel && docker build --target cpu -t saccade:cpu .     (or cuda, in both places)
# docker run --rm -v "$PWD:/work" saccade:cpu quickstart --quick
# The context is the wheel and its constraints, see .dockerignore.
FROM python:3.11-slim AS base
RUN useradd --create-home --uid 1000 saccade && chmod 777 /home/saccade
ENV PATH=/opt/saccade/bin:$PATH HOME=/home/saccade PYTHONUNBUFFERED=1
WORKDIR /work
ENTRYPOINT ["saccade"]
CMD ["--help"]

FROM base AS cpu
COPY . /src
RUN bash /src/scripts/image.sh /opt/saccade cpu
USER 1000

# torch brings CUDA; the driver is the host's. Triton compiles its launchers with gcc.
FROM base AS cuda
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN bash /src/scripts/image.sh /opt/saccade cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
