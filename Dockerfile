# One image for every process of a cluster: `baton serve router|prefill|decode`.
#
#   docker build -t baton .                                                      for CPUs
#   docker build -t baton:gpu --build-arg TORCH=torch==2.13.0 --build-arg TORCH_INDEX= .
#
# TORCH_INDEX is used in addition to PIP_INDEX_URL. Leave it empty if PIP_INDEX_URL has the build, or
# if TORCH_INDEX is unreachable: pip would retry for more than a minute.
#
# Without access to public registries, set your own images and package index. BUILD_IMAGE may
# contain a pip.conf, certificates or wheels, which do not get into the final image. Both images
# must have the same python3, and BUILD_IMAGE needs venv.
ARG PYTHON_IMAGE=python:3.12-slim
ARG BUILD_IMAGE=${PYTHON_IMAGE}

FROM ${BUILD_IMAGE} AS build
# The CPU build, without CUDA libraries, as in tools/install.sh.
ARG TORCH=torch==2.13.0+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# The compiler of the native kernels; it does not get into the final image.
RUN command -v c++ || (apt-get update && apt-get install -y --no-install-recommends g++)
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# pip is in /pip and installs into /opt/baton, which is copied into the final image.
RUN python3 -m venv /pip && python3 -m venv --without-pip /opt/baton
ENV PIP="/pip/bin/pip --python /opt/baton/bin/python"
WORKDIR /src
COPY constraints.txt ./
RUN ${PIP} install -c constraints.txt ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} "${TORCH}"

# Extras of pyproject.toml, such as ucxx. After torch, so that other extras reuse its layer.
ARG EXTRAS
# Dependencies, installed from pyproject.toml alone, so that code changes reuse their layer.
COPY pyproject.toml ./
COPY deploy/image/requirements.py deploy/image/slim.sh deploy/image/
RUN python3 deploy/image/requirements.py project.dependencies > /tmp/run.txt \
    && for extra in ${EXTRAS}; do \
        python3 deploy/image/requirements.py "project.optional-dependencies.${extra}" \
            >> /tmp/run.txt || exit 1; done \
    && python3 deploy/image/requirements.py build-system.requires > /tmp/build.txt \
    && ${PIP} install -c constraints.txt -r /tmp/run.txt \
    && /pip/bin/pip install -c constraints.txt -r /tmp/build.txt \
    && sh deploy/image/slim.sh /opt/baton

COPY . .
# The wheel has all kernel variants, since the image may run on another processor than this one.
RUN /pip/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel . \
    && ${PIP} install --no-deps /tmp/wheel/*.whl

FROM ${PYTHON_IMAGE}
# The NIXL wheel brings its own UCX, but not OpenSSL. Most Python images have it.
RUN ldconfig -p | grep -q libssl.so.3 \
    || (apt-get update && apt-get install -y --no-install-recommends libssl3 \
        && rm -rf /var/lib/apt/lists/*)
# Downloaded models go to .cache. It is created here so that the user owns volumes mounted on it.
RUN groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid baton --create-home --shell /usr/sbin/nologin baton \
    && mkdir -p /home/baton/.cache \
    && chown baton:baton /home/baton/.cache
COPY --from=build /opt/baton /opt/baton
COPY models/demo /models/demo
# PASSIVE: an idle thread of torch sleeps. Spinning would take the cores of the other containers.
ENV PATH=/opt/baton/bin:$PATH \
    OMP_WAIT_POLICY=PASSIVE \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/baton
ENTRYPOINT ["baton"]
CMD ["--help"]
