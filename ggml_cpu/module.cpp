// ftgguf._ggml_cpu: graphs of ggml operators over the libraries that llama-cpp-python installs.
#include "backend.h"

NB_MODULE(_ggml_cpu, m) {
    ftgguf::bind_backend(m);
    ftgguf::bind_graph(m);
    ftgguf::bind_cells(m);
    ftgguf::bind_experts(m);
}
