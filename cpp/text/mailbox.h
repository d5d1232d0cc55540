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
  // `notify` is called on the computing thread when the mailbox becomes non-empty, until close().
  // It must be fast, must not throw and must not call the mailbox, e.g. write a byte to a socket.
  // It is not needed for wait().
  explicit Mailbox(std::function<void()> notify = nullptr) : notify_(std::move(notify)) {}

  void post(const std::shared_ptr<Generation>& generation) {
    const std::lock_guard lock(mutex_);
    news_.push_back(generation);
    if (news_.size() > 1) return;
    changed_.notify_all();
    if (notify_) notify_();
  }

  // The generations posted since the last call that still exist.
  std::vector<std::shared_ptr<Generation>> take() {
    std::vector<std::weak_ptr<Generation>> news;
    {
      const std::lock_guard lock(mutex_);
      news.swap(news_);
    }
    std::vector<std::shared_ptr<Generation>> found;
    for (const std::weak_ptr<Generation>& one : news) {
      if (auto generation = one.lock()) found.push_back(std::move(generation));
    }
    return found;
  }

  // No notification is in progress afterwards, and none follows.
  void close() {
    const std::lock_guard lock(mutex_);
    notify_ = nullptr;
  }

  // Waits until there are events or the timeout expires.
  void wait(std::chrono::milliseconds at_most) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, at_most, [this] { return !news_.empty(); });
  }

 private:
  std::function<void()> notify_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Weak: the engine, which posts while it holds its lock, may release the last reference to the
  // mailbox, and must not destroy a generation then, whose callbacks may call the engine.
  std::vector<std::weak_ptr<Generation>> news_;
};

}  // namespace h2o
