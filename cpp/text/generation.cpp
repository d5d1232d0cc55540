#include "text/generation.h"

#include <utility>

namespace h2o {

Generation::Generation(std::shared_ptr<EngineMonitor> monitor, Request request)
    : monitor_(std::move(monitor)), request_(std::move(request)), detokenizer_(request_.stop) {}

Progress Generation::progress() const {
  const std::lock_guard lock(monitor_->mutex);
  return progress_;
}

std::vector<int32_t> Generation::tokens() const {
  const std::lock_guard lock(monitor_->mutex);
  return tokens_;
}

std::vector<int32_t> Generation::generated_tokens() const {
  const std::lock_guard lock(monitor_->mutex);
  return {tokens_.begin() + static_cast<std::ptrdiff_t>(n_input_tokens_), tokens_.end()};
}

std::string Generation::text() const {
  const std::lock_guard lock(monitor_->mutex);
  return text_;
}

std::string Generation::text_read() const {
  const std::lock_guard lock(monitor_->mutex);
  return text_.substr(0, text_read_);
}

int32_t Generation::n_tokens_read() const {
  const std::lock_guard lock(monitor_->mutex);
  return ended() && pieces_.empty() ? progress_.n_generated : n_tokens_read_;
}

int32_t Generation::n_tokens() const {
  const std::lock_guard lock(monitor_->mutex);
  return static_cast<int32_t>(tokens_.size());
}

bool Generation::began() const {
  const std::lock_guard lock(monitor_->mutex);
  return began_;
}

bool Generation::admitted() const {
  const std::lock_guard lock(monitor_->mutex);
  return admitted_;
}

bool Generation::has_ended() const {
  const std::lock_guard lock(monitor_->mutex);
  return ended();
}

std::vector<float> Generation::embedding() const {
  const Progress now = progress();
  if (now.finish == Finish::none || now.finish == Finish::cancelled) return {};
  const double n = request_.pooling == Pooling::mean ? now.n_prompt : 1;
  std::vector<float> mean(pooled_.size());
  for (size_t i = 0; i < mean.size(); ++i) mean[i] = static_cast<float>(pooled_[i] / n);
  return mean;
}

void Generation::notify(const std::shared_ptr<Generation>& generation) noexcept {
  const std::shared_ptr<Mailbox> mailbox = generation->mailbox_.lock();
  if (mailbox == nullptr) return;
  try {
    mailbox->post(generation);
  } catch (const std::bad_alloc&) {
  }
}

Piece Generation::take_piece() {
  const End end = pieces_.front();
  Piece piece = {text_.substr(text_read_, end.text - text_read_), end.n_tokens};
  pieces_.pop_front();
  n_tokens_read_ = end.n_tokens;
  last_read_at_ = std::chrono::steady_clock::now();
  text_read_ = end.text;
  return piece;
}

Piece Generation::take_all() {
  while (pieces_.size() > 1) pieces_.pop_front();
  return take_piece();
}

}  // namespace h2o
