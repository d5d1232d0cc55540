// Mailbox: collects generations with new events for an event loop or a thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace h2o {

class Generation;

class Mailbox {
 public:
  // `notify` is called on the computing thread when the mailbox becomes non-empty. It must be fast
  // and must not throw, e.g. write a byte to a socket. Not needed for wait().
  explicit Mailbox(std::function<void()> notify = nullptr) : notify_(std::move(notify)) {}

  void post(std::shared_ptr<Generation> generation) {
    {
      const std::lock_guard lock(mutex_);
      news_.push_back(std::move(generation));
      if (news_.size() > 1) return;
    }
    changed_.notify_all();
    if (notify_) notify_();
  }

  // The generations posted since the last call.
  std::vector<std::shared_ptr<Generation>> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(news_, {});
  }

  // Waits until there are events or the timeout expires.
  void wait(std::chrono::milliseconds at_most) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, at_most, [this] { return !news_.empty(); });
  }

 private:
  const std::function<void()> notify_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Generation>> news_;
};

}  // namespace h2o
