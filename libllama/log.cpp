// What libllama and ggml log, as lines for Python.
#include "log.hpp"

#include <cstdio>

namespace ftgguf {

namespace {
std::mutex capture_mutex;  // one capture at a time: the callback is process-wide
constexpr std::size_t MAX_KEPT = 16 * 1024;
}  // namespace

LogCapture::LogCapture() : lock_(capture_mutex) {
    llama_log_get(&previous_, &previous_data_);
    llama_log_set(&LogCapture::receive, this);
}

LogCapture::~LogCapture() { llama_log_set(previous_, previous_data_); }

void LogCapture::receive(ggml_log_level level, const char *text, void *self) {
    auto *capture = static_cast<LogCapture *>(self);
    if (level != GGML_LOG_LEVEL_CONT) capture->level_ = level;
    if (capture->level_ == GGML_LOG_LEVEL_ERROR && capture->errors_.size() < MAX_KEPT) capture->errors_ += text;
}

std::string LogCapture::reason() const {
    // The first line is the innermost cause; later ones only say that loading failed.
    std::string line = errors_.substr(0, errors_.find('\n'));
    if (const auto colon = line.find(": "); colon != std::string::npos && line.rfind("llama", 0) == 0) {
        line = line.substr(colon + 2);
    }
    return line.empty() ? "libllama gave no reason" : line;
}

void quiet_log() {
    llama_log_set([](ggml_log_level level, const char *text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
    }, nullptr);
}

}  // namespace ftgguf
