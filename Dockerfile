# docker build --target cpu -t tokenspeed:cpu .     for a CPU
# docker build --target cuda -t tokenspeed:cuda .   for an NVIDIA GPU

FROM python:3.12-slim AS base
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY tokenspeed_core tokenspeed_core
COPY tokenspeed_kernels tokenspeed_kernels
COPY tokenspeed_models tokenspeed_models
COPY plugins plugins
EXPOSE 8000
ENTRYPOINT ["tokenspeed", "serve"]
CMD ["--host", "0.0.0.0"]

FROM base AS cpu
RUN pip install torch==2.13.0 \
 && pip install ./tokenspeed_core ./tokenspeed_kernels ./tokenspeed_models \
    ./plugins/tokenspeed-server ./plugins/tokenspeed-parsers ./plugins/tokenspeed-demo \
    ./plugins/tokenspeed-chat ./plugins/tokenspeed-bench ./plugins/tokenspeed-testing \
    ./plugins/tokenspeed-plugin-tools ./plugins/tokenspeed-models-* ./plugins/tokenspeed-quantization \
    ./plugins/tokenspeed-grammars-llguidance ./plugins/tokenspeed-drafters ./plugins/tokenspeed-otel
# Downloads of models go to a folder that a volume may replace.
RUN useradd --create-home --uid 1000 tokenspeed \
 && install --directory --owner tokenspeed /cache
ENV HF_HOME=/cache
USER tokenspeed
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]

FROM cpu AS cuda
USER root
# Triton compiles a small launcher with a C compiler when the server starts.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN pip install ./plugins/tokenspeed-kernels-hopper ./plugins/tokenspeed-kernels-flashinfer \
    ./plugins/tokenspeed-kernels-blackwell ./plugins/tokenspeed-kernels-deepgemm
USER tokenspeed
