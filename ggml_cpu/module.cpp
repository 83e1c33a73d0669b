// ftgguf._ggml_cpu: graphs of ggml operators over the libraries that llama-cpp-python installs.
#include <nanobind/nanobind.h>

#include "ggml.h"

namespace nb = nanobind;

NB_MODULE(_ggml_cpu, m) {
    m.def("ggml_version", [] { return ggml_version(); }, "ggml's version string, as linked.");
}
