"""Server and HTTP."""

from __future__ import annotations

from ftgguf.flags import values as v
from ftgguf.flags.row import Flag, Warn, grouped, switch, value, void

_ENV = "LLAMA_ARG_"


def _sleep(text: str, warn: Warn) -> int:
    seconds = v.stoi(text, warn)
    if seconds == 0 or seconds < -1:
        raise ValueError("invalid value: cannot be 0 or less than -1")
    return seconds


FLAGS: tuple[Flag, ...] = grouped(
    "server",
    value("--host", hint="HOST", parse=v.hosts, to="http.hosts", env=_ENV + "HOST", shown="127.0.0.1",
          help="addresses to listen on, comma-separated; one that ends in .sock is a UNIX socket"),
    value("--port", hint="PORT", parse=v.whole(0, 65535), to="http.port", env=_ENV + "PORT",
          help="port, 0 to pick a free one"),
    void("--reuse-port", to="http.reuse_port", env=_ENV + "REUSE_PORT", tier="B",
         note="sets SO_REUSEPORT where the system has it", help="let several servers share the port"),
    value("--path", hint="PATH", parse=v.existing_dir, to="http.static_path", env=_ENV + "STATIC_PATH", shown="none",
          help="folder of static files to serve in place of the UI"),
    value("--api-prefix", hint="PREFIX", parse=v.text, to="http.api_prefix", env=_ENV + "API_PREFIX", shown="none",
          help="path before every route, without the slash at its end"),
    value("--api-key", hint="KEY", parse=v.csv, to="http.api_keys", mode="append", env="LLAMA_API_KEY", shown="none",
          help="keys that clients must give, comma-separated"),
    value("--api-key-file", hint="FNAME", parse=v.key_file, to="http.api_keys", mode="append",
          env=_ENV + "API_KEY_FILE", shown="none", help="file of such keys, one a line, # for comments"),
    value("--cors-origins", hint="ORIGINS", parse=v.text, to="http.cors_origins", env=_ENV + "CORS_ORIGINS",
          help="origins browsers may call from, comma-separated; localhost for local ones only"),
    value("--cors-methods", hint="METHODS", parse=v.text, to="http.cors_methods", env=_ENV + "CORS_METHODS",
          help="methods browsers may use, comma-separated"),
    value("--cors-headers", hint="HEADERS", parse=v.text, to="http.cors_headers", env=_ENV + "CORS_HEADERS",
          help="headers browsers may send, comma-separated"),
    switch("--cors-credentials", no=("--no-cors-credentials",), to="http.cors_credentials",
           env=_ENV + "CORS_CREDENTIALS",
           help="let browsers send credentials; with origins * the request's origin is echoed"),
    value("--ssl-key-file", hint="FNAME", parse=v.existing_file, to="http.ssl_key_file", env=_ENV + "SSL_KEY_FILE",
          tier="B", note="TLS by Python's ssl module", shown="none", completes="*.pem",
          help="private key for TLS, PEM"),
    value("--ssl-cert-file", hint="FNAME", parse=v.existing_file, to="http.ssl_cert_file",
          env=_ENV + "SSL_CERT_FILE", tier="B", note="TLS by Python's ssl module", shown="none", completes="*.pem",
          help="certificate for TLS, PEM"),
    value("-to", "--timeout", hint="N", parse=v.whole(0), to="http.timeout", env=_ENV + "TIMEOUT",
          help="read and write timeout in seconds"),
    value("--threads-http", hint="N", parse=v.stoi, env=_ENV + "THREADS_HTTP", tier="C",
          note="one event loop serves all connections", help="threads for HTTP"),
    value("--sse-ping-interval", hint="N", parse=v.whole(-1), to="http.sse_ping_interval",
          env=_ENV + "SSE_PING_INTERVAL", help="seconds between pings of a stream, -1 for none"),
    void("--metrics", to="http.metrics", env=_ENV + "ENDPOINT_METRICS", help="serve GET /metrics for Prometheus"),
    void("--props", to="http.props", env=_ENV + "ENDPOINT_PROPS", help="allow POST /props"),
    switch("--slots", no=("--no-slots",), to="http.slots", env=_ENV + "ENDPOINT_SLOTS", help="serve GET /slots"),
    value("--sleep-idle-seconds", hint="SECONDS", to="http.sleep_idle_seconds", tier="B",
          parse=_sleep, note="the engine process ends; a request starts it again",
          help="unload the model after this long without requests, -1 for never"),
    switch("--ui", "--webui", no=("--no-ui", "--no-webui"), to="http.ui", env=_ENV + "UI", tier="B", tier_off="A",
           note="a small status page stands in place of llama-server's UI", help="serve a page at /"),
    value("--ui-config", "--webui-config", hint="JSON", parse=v.json_object, to="http.ui_config", tier="C",
          env=_ENV + "UI_CONFIG", note="shown in /props; our page has no settings", shown="none",
          help="settings of the web UI"),
    value("--ui-config-file", "--webui-config-file", hint="PATH", parse=v.json_object_file, to="http.ui_config",
          tier="C", env=_ENV + "UI_CONFIG_FILE", note="shown in /props; our page has no settings", shown="none",
          completes="*.json", help="file with settings of the web UI"),
)  # fmt: skip
