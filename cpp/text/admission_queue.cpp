#include "text/admission_queue.h"

#include <new>

namespace h2o {

void AdmissionQueue::set_max_eager(int32_t n) {
  max_eager_ = n;
  admit();
}

void AdmissionQueue::add(const Handle& generation) {
  const bool is_eager = generation->request_.eager;
  if (is_eager && (n_eager_ >= max_eager_ || !unadmitted_.empty())) {
    unadmitted_.push_back(generation);
    generation->admitted_ = false;
  } else {
    admitted_.push_back(generation);
    n_eager_ += is_eager;
  }
  generation->submitted_ = true;
}

void AdmissionQueue::push_front(const Handle& generation) {
  admitted_.push_front(generation);
  n_eager_ += generation->request_.eager;
}

void AdmissionQueue::pop_front() {
  n_eager_ -= admitted_.front()->request_.eager;
  admitted_.pop_front();
}

bool AdmissionQueue::remove(const Handle& generation) {
  const auto remove_from = [&](std::deque<Handle>& list) {
    const auto found = std::ranges::find(list, generation);
    if (found == list.end()) return false;
    list.erase(found);
    return true;
  };
  if (!remove_from(admitted_)) return remove_from(unadmitted_);
  n_eager_ -= generation->request_.eager;
  return true;
}

void AdmissionQueue::admit() noexcept {
  while (!unadmitted_.empty() && n_eager_ < max_eager_) {
    const Handle generation = unadmitted_.front();
    try {
      admitted_.push_back(generation);
    } catch (const std::bad_alloc&) {
      return;
    }
    unadmitted_.pop_front();
    generation->admitted_ = true;
    ++n_eager_;
    Generation::notify(generation);
  }
}

}  // namespace h2o
