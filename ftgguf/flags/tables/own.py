"""Flags llama-server does not have."""

from __future__ import annotations

from ftgguf.flags import values as v
from ftgguf.flags.row import Flag, grouped, value, void

FLAGS: tuple[Flag, ...] = grouped(
    "ftgguf",
    value("--vram-budget", hint="MiB", parse=v.whole(1), to="placement.vram_budget",
          shown="what is free, less --fit-target", help="device memory never to exceed, everything counted"),
    value("--moe-mode", hint="MODE", parse=v.choice("auto", "resident", "offload", "hybrid", "cpu"),
          to="placement.moe_mode",
          help="where experts run: resident (all in VRAM), offload (misses fetched to the GPU), hybrid (misses shared "
               "between fetching and the CPU), cpu, or auto, which is measured"),
    value("--expert-cache", hint="MiB", parse=v.whole(0), to="placement.expert_cache", shown="what VRAM is left",
          help="VRAM for cached experts, 0 for none"),
    value("--expert-policy", hint="POLICY", parse=v.choice("decay", "lru"), to="placement.expert_policy",
          help="which expert leaves the cache: decay (least frequent, forgetting) or lru"),
    void("--expert-disk", to="placement.expert_disk",
         help="read experts from the mapped file where host memory cannot hold them all"),
    value("--pin-budget", hint="MiB", parse=v.whole(0), to="placement.pin_budget", shown="all of the expert pool",
          help="host memory that may be page-locked; experts beyond it run on the CPU"),
    value("--weights-layout", hint="LAYOUT", parse=v.choice("auto", "plain", "repacked", "both"),
          to="placement.weights_layout",
          help="CPU weights: plain (as in the file, better for prompts), repacked (better for generation), both, auto "
               "(both if memory allows)"),
    value("--record-routing", hint="FILE", parse=v.text, to="placement.record_routing", shown="none",
          completes="*.npz", help="write which experts were used, for ftgguf bench cache"),
    value("--record", hint="FILE", parse=v.text, to="http.record", shown="none", completes="*.jsonl",
          help="write requests and timings, secrets masked, for ftgguf bench trace"),
    void("--debug-eager", to="placement.debug_eager",
         help="run every step without CUDA graphs, to find a faulting kernel"),
    value("--store", hint="DIR", parse=v.text, to="model.store", shown="the user's data folder",
          help="folder of pulled models"),
    value("--keep-alive", hint="TIME", parse=v.duration, to="model.keep_alive", shown="5m",
          help="how long a model loaded on demand stays after its last request; negative for ever"),
    value("--allow-pull", hint="[auto|on|off]", parse=v.on_off_auto("--allow-pull"), to="model.allow_pull",
          help="pull and delete over HTTP: auto (local clients, if no API key is set), on, off"),
    value("--pull-hosts", hint="HOST,...", parse=v.names, to="model.pull_hosts",
          help="registries that may be pulled from over HTTP"),
    void("--completion-zsh", action="completion-zsh", help="print a completion script for zsh and exit"),
    void("--completion-fish", action="completion-fish", help="print a completion script for fish and exit"),
)  # fmt: skip
