"""What this server does not do: refused by name, with what to use instead."""

from __future__ import annotations

from ftgguf.flags import values as v
from ftgguf.flags.row import Flag, grouped, switch, value

_ENV = "LLAMA_ARG_"
_AGENT = "the web UI's agent features run commands for whoever reaches the port; run tools in the client instead"
_VISION = "images, audio and video are not supported; remove it to serve the model's text part"
_VECTOR = "control vectors are not supported; merge the change into the GGUF file"

_VECTORS: tuple[Flag, ...] = (
    value("--control-vector", hint="FNAME", parse=v.text, tier="D", note=_VECTOR,
          help="control vector"),
    value("--control-vector-scaled", hint="FNAME:SCALE,...", parse=v.text, tier="D", note=_VECTOR,
          help="control vector with a scale"),
    value("--control-vector-layer-range", hint="START", hint2="END", parse=v.stoi, tier="D", note=_VECTOR,
          help="layers of the control vector"),
)  # fmt: skip

_SERVER: tuple[Flag, ...] = grouped(
    "server",
    switch("--ui-mcp-proxy", "--webui-mcp-proxy", no=("--no-ui-mcp-proxy", "--no-webui-mcp-proxy"), tier="D",
           env=_ENV + "UI_MCP_PROXY", note=_AGENT, help="proxy for MCP servers"),
    value("--tools", hint="TOOL1,TOOL2,...", parse=v.csv, env=_ENV + "TOOLS", tier="D", note=_AGENT,
          help="built-in tools for the web UI"),
    value("--tools-runtime", hint="OPTION", parse=v.text, env=_ENV + "TOOLS_RUNTIME", tier="D", note=_AGENT,
          help="where built-in tools run"),
    value("--mcp-servers-config", hint="PATH", parse=v.text, env=_ENV + "MCP_SERVERS_CONFIG", tier="D", note=_AGENT,
          help="file of MCP servers"),
    value("--mcp-servers-json", hint="JSON", parse=v.text, env=_ENV + "MCP_SERVERS_JSON", tier="D", note=_AGENT,
          help="MCP servers"),
    switch("-ag", "--agent", no=("-no-ag", "--no-agent"), env=_ENV + "AGENT", tier="D", note=_AGENT,
           help="all built-in tools and the MCP proxy"),
    value("-mm", "--mmproj", hint="FILE", parse=v.text, to="model.mmproj", env=_ENV + "MMPROJ", tier="D",
          note=_VISION, help="multimodal projector"),
    value("-mmu", "--mmproj-url", hint="URL", parse=v.text, to="model.mmproj_url", env=_ENV + "MMPROJ_URL", tier="D",
          note=_VISION, help="multimodal projector from a URL"),
    switch("--mmproj-auto", no=("--no-mmproj", "--no-mmproj-auto"), to="model.use_mmproj", env=_ENV + "MMPROJ_AUTO",
           tier="C", tier_off="A", note="images are not supported, so a projector is left out",
           help="use the multimodal projector of a repository"),
    switch("--mmproj-offload", no=("--no-mmproj-offload",), env=_ENV + "MMPROJ_OFFLOAD", tier="D", note=_VISION,
           help="projector on the GPU"),
    value("-mmdev", "--mmproj-device", hint="DEVICE", parse=v.text, env="MTMD_BACKEND_DEVICE", tier="D",
          note=_VISION, help="device of the projector"),
    value("--image-min-tokens", hint="N", parse=v.stoi, env=_ENV + "IMAGE_MIN_TOKENS", tier="D", note=_VISION,
          help="least tokens of an image"),
    value("--image-max-tokens", hint="N", parse=v.stoi, env=_ENV + "IMAGE_MAX_TOKENS", tier="D", note=_VISION,
          help="most tokens of an image"),
    value("--mtmd-batch-max-tokens", hint="N", parse=v.stoi, env=_ENV + "MTMD_BATCH_MAX_TOKENS", tier="D",
          note=_VISION, help="image tokens per batch"),
    value("--video-fps", hint="N", parse=v.real(), env=_ENV + "VIDEO_FPS", tier="D", note=_VISION,
          help="frames per second of a video"),
    value("--video-timestamp-interval", hint="N", parse=v.stoi, env=_ENV + "VIDEO_TIMESTAMP_INTERVAL", tier="D",
          note=_VISION, help="milliseconds between timestamps of a video"),
    value("--video-ffmpeg-dir", hint="DIR", parse=v.text, env=_ENV + "VIDEO_FFMPEG_DIR", tier="D", note=_VISION,
          help="folder of ffmpeg"),
    value("--media-path", hint="PATH", parse=v.text, tier="D", note=_VISION, help="folder of media files"),
)  # fmt: skip

FLAGS: tuple[Flag, ...] = _VECTORS + _SERVER
