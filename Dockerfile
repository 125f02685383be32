# One image for every process of a cluster: `baton serve router|prefill|decode`.
#
#   docker build -t baton .                                                      for CPUs
#   docker build -t baton:gpu --build-arg TORCH=torch==2.13.0 --build-arg TORCH_INDEX= .
#
# TORCH_INDEX is asked besides PIP_INDEX_URL; leave it empty where that one has the build, or where
# it is out of reach: pip tries it for more than a minute before it goes on.
#
# Where registries are out of reach, name your own images and package index. BUILD_IMAGE may hold
# more than PYTHON_IMAGE, such as a pip.conf, certificates or wheels: none of it stays. Both must
# have the same python3, with venv in BUILD_IMAGE.
ARG PYTHON_IMAGE=python:3.12-slim
ARG BUILD_IMAGE=${PYTHON_IMAGE}

FROM ${BUILD_IMAGE} AS build
# As in tools/install.sh: the CPU build, so that no CUDA libraries are pulled in.
ARG TORCH=torch==2.13.0+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# For the native kernels; it stays behind with this stage.
RUN command -v c++ || (apt-get update && apt-get install -y --no-install-recommends g++)
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# pip stays in /pip; what it installs goes to /opt/baton, which is all that is taken over.
RUN python3 -m venv /pip && python3 -m venv --without-pip /opt/baton
ENV PIP="/pip/bin/pip --python /opt/baton/bin/python"
WORKDIR /src
COPY constraints.txt ./
RUN ${PIP} install -c constraints.txt ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} "${TORCH}"

# Extras of pyproject.toml, such as ucxx. Not above: other extras do not fetch torch again.
ARG EXTRAS
# What Baton needs, told by pyproject.toml alone: a change of code does not fetch it again.
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
RUN /pip/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel . \
    && ${PIP} install --no-deps /tmp/wheel/*.whl
# For each kind of processor, since the one that builds is not the one that serves.
RUN XDG_CACHE_HOME=/tmp /opt/baton/bin/python deploy/image/kernels.py \
    && mv /tmp/baton/kernels /opt/baton/kernels

FROM ${PYTHON_IMAGE}
# The NIXL wheel brings its own UCX, but not OpenSSL. Most Python images have it.
RUN ldconfig -p | grep -q libssl.so.3 \
    || (apt-get update && apt-get install -y --no-install-recommends libssl3 \
        && rm -rf /var/lib/apt/lists/*)
# Models that are downloaded go to .cache. It is made here so that a volume on it is the user's, too.
RUN groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid baton --create-home --shell /usr/sbin/nologin baton \
    && mkdir -p /home/baton/.cache \
    && chown baton:baton /home/baton/.cache
COPY --from=build /opt/baton /opt/baton
COPY models/demo /models/demo
# PASSIVE: an idle thread of torch sleeps. Spinning would take the cores of the other containers.
ENV PATH=/opt/baton/bin:$PATH \
    BATON_KERNELS=/opt/baton/kernels \
    OMP_WAIT_POLICY=PASSIVE \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/baton
ENTRYPOINT ["baton"]
CMD ["--help"]
