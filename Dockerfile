# jitckpt and its libraries on Debian's own Python: docs/guides/containers.md.
FROM debian:bookworm-slim AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Debian keeps one version of each only.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/jitckpt
WORKDIR /source
# torch is the largest part, and changes less often than the source.
COPY requirements.lock .
RUN /opt/jitckpt/bin/pip install --no-cache-dir "$(grep '^torch==' requirements.lock)" -c requirements.lock
COPY . .
RUN /opt/jitckpt/bin/pip install --no-cache-dir -c requirements.lock '.[etcd,metrics,s3]'

FROM debian:bookworm-slim
# /training/ckpt, where saves go by default: a volume that is new has its rights, so any user writes there.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && mkdir /training \
    && mkdir --mode 1777 /training/ckpt \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/jitckpt /opt/jitckpt
# HOME: of users that /etc/passwd does not know, and of libraries that keep something there.
ENV PATH=/opt/jitckpt/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1
WORKDIR /training
# Any other number does: docker run --user.
USER 1000:1000
ENTRYPOINT ["jitckpt"]
CMD ["--help"]
