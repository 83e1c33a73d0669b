// ftgguf._libllama: libllama's vocabulary and samplers, with every input bounded before it reaches them.
#include <nanobind/nanobind.h>

#include "llama.h"

namespace nb = nanobind;

NB_MODULE(_libllama, m) {
    m.def("backend_init", [] { llama_backend_init(); }, "Initialise libllama once in a process.");
}
