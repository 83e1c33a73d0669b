// libllama logs through one process-wide callback. While a LogCapture lives, warnings and errors are kept here instead
// of going to stderr, so that a failure can be reported with its cause.
#pragma once

#include <mutex>
#include <string>

#include "llama.h"

namespace ftgguf {

class LogCapture {
  public:
    LogCapture();
    ~LogCapture();
    LogCapture(const LogCapture &) = delete;
    LogCapture &operator=(const LogCapture &) = delete;

    // The last error that says why: "error loading model" lines first, one line, without libllama's function name.
    std::string reason() const;

  private:
    static void receive(ggml_log_level level, const char *text, void *self);

    std::unique_lock<std::mutex> lock_;
    std::string errors_;
    ggml_log_level level_ = GGML_LOG_LEVEL_NONE;
    ggml_log_callback previous_ = nullptr;
    void *previous_data_ = nullptr;
};

// From now on only libllama's errors reach stderr; it says much that is no news to a user.
void quiet_log();

}  // namespace ftgguf
