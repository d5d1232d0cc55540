// Mailbox: tells an event loop, or a thread, which generations have news.
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
  // `notify` is called, by the thread that computes, when the mailbox was empty and is no longer.
  // It must be quick and must not throw: it writes a byte to a socket. Threads that wait() need
  // none.
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

  // Those posted since the last call.
  std::vector<std::shared_ptr<Generation>> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(news_, {});
  }

  // Waits until there is news, or for a while.
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
