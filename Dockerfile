# Two images. Target kybernate is what production runs: the services, the webhook and the probe, nats-server, kyb. Target
# kybernate-dev adds kybernate/dev and kybernate/lab: fake GPUs, kubelet and engines, the demo and the simulator.
# `make image` builds it, also with the builder that knows no --mount; docs/install.md says what goes in and what stays out.
ARG BASE=python:3.13-slim-trixie

# --- wheels, and the environment that is copied; nothing else of this stage is kept ----------------------------------
FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
#secrets COPY build-secrets/ /run/secrets/
COPY requirements/build.txt requirements/image.txt requirements/run.txt requirements/
COPY scripts/image_python.sh ./
RUN --mount=type=secret,id=ca --mount=type=secret,id=pip sh image_python.sh dependencies
ARG SOURCE_DATE_EPOCH=0
COPY pyproject.toml README.md scripts/http_ok.sh ./
COPY kybernate kybernate
COPY services services
RUN sh image_python.sh product

FROM build AS build-dev
RUN sh image_python.sh product-dev

# --- what runs -----------------------------------------------------------------------------------------------------
FROM ${BASE} AS kybernate
RUN echo 'kybernate:x:65532:65532:Kybernate:/nonexistent:/usr/sbin/nologin' >>/etc/passwd \
 && echo 'kybernate:x:65532:' >>/etc/group \
 && install -d -o 65532 -g 65532 /run/kybernate /run/fake-gpu /var/lib/kybernate /var/lib/kybernate/bin /var/lib/nats \
      /var/lib/kubelet /var/lib/kubelet/device-plugins
COPY --from=build /opt/kybernate /opt/kybernate
ENV PATH=/opt/kybernate/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
CMD ["kyb", "--help"]
ARG BASE
ARG VERSION=0
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.title="kybernate" \
      org.opencontainers.image.description="Host more LLMs than you have GPU memory for" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE}"

# --- the same with fakes, demo and simulator -------------------------------------------------------------------------
FROM kybernate AS kybernate-dev
COPY --from=build-dev /added /

# The default target of `docker build .`.
FROM kybernate
