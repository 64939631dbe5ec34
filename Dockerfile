# manyhands on the CPU, in a container: what `make demo` shows, on any machine that runs Linux containers.
#
#   docker build -t manyhands --build-arg CPU_INDEX=... .
#   docker run --rm --init --shm-size=1g manyhands                                   # the demo
#   docker run --rm --init --shm-size=1g -v "$PWD:/work" manyhands mh run -n 2 train.py
#
# --shm-size: data loader processes hand batches over in /dev/shm, of which Docker gives 64 MB unless asked for more.
FROM python:3.11 AS wheel
COPY . /source
RUN pip wheel --no-cache-dir --no-deps -w /wheels /source

FROM python:3.11-slim
# The index of torch's CPU builds, as PyTorch's own page of install commands names it; without it pip takes CUDA's.
ARG CPU_INDEX=""
RUN pip install --no-cache-dir torch==2.13.0 ${CPU_INDEX:+-i "$CPU_INDEX"}
COPY --from=wheel /wheels /wheels
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir -c /wheels/constraints.txt /wheels/*.whl
RUN useradd --create-home trainer && mkdir /work && chown trainer /work
USER trainer
WORKDIR /work
CMD ["mh", "demo"]
