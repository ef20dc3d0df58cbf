# The app as a server for others, on the processor; docs/serving.md says how to run it.
FROM python:3.11-slim AS build
WORKDIR /src
RUN python -m pip install --no-cache-dir --disable-pip-version-check uv==0.13.9 && uv venv --no-cache /opt/featcal
COPY requirements.lock ./
# The pinned packages but those that drive a GPU, and torch as it is built without one.
RUN grep -v -E '^(nvidia|cuda|triton)' requirements.lock > cpu.lock \
    && uv pip install --no-cache --python /opt/featcal --torch-backend cpu --compile-bytecode -r cpu.lock
COPY pyproject.toml README.md LICENSE ./
COPY featcal ./featcal
COPY app ./app
COPY pages ./pages
COPY data ./data
RUN uv pip install --no-cache --python /opt/featcal --no-deps --compile-bytecode .

FROM python:3.11-slim
COPY --from=build /opt/featcal /opt/featcal
# What changes lies in two places: what visitors bring (/data), and what featcal keeps (/cache). With `root` for an owner
# of the first one, visitors only look.
ARG DATA_OWNER=featcal
RUN useradd --uid 1000 --home-dir /cache --no-create-home --shell /usr/sbin/nologin featcal \
    && mkdir /data /cache && chown featcal:featcal /cache && chown $DATA_OWNER /data
ENV PATH="/opt/featcal/bin:$PATH" HOME=/cache FEATCAL_CACHE=/cache/featcal NUMBA_CACHE_DIR=/cache/numba \
    PYTHONDONTWRITEBYTECODE=1
USER featcal
WORKDIR /data
VOLUME ["/data", "/cache"]
EXPOSE 8501
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s \
    CMD ["python", "-c", "import os; from urllib.request import urlopen; base = os.environ.get('STREAMLIT_SERVER_BASE_URL_PATH', '').strip('/'); urlopen('http://127.0.0.1:8501/' + f'{base}/_stcore/health'.lstrip('/'), timeout=5)"]
ENTRYPOINT ["featcal", "app", "--shared", "--root", "/data"]
