// AdmissionQueue: generations that wait for a sequence, in order of arrival. It admits at most a
// given number of eager ones; the others wait, and are notified when they are admitted.
//
// Guarded by the mutex of the engine's monitor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>

#include "text/generation.h"

namespace h2o {

class AdmissionQueue {
 public:
  using Handle = std::shared_ptr<Generation>;

  // Limits the number of eager generations; those that are already admitted stay.
  void set_max_eager(int32_t n);

  // Appends a generation, which is submitted then, or lets it wait for admission.
  void add(const Handle& generation);

  // Puts back a generation that was taken from the front.
  void push_front(const Handle& generation);

  // The next admitted generation; requires has_admitted().
  bool has_admitted() const { return !admitted_.empty(); }
  const Handle& front() const { return admitted_.front(); }
  void pop_front();

  // Removes a generation; false if it is not here. May make room for admit().
  bool remove(const Handle& generation);

  // Admits generations while there is room. Without memory, it admits them at a later call.
  void admit() noexcept;

  // Returns a generation for which `test` holds, first among those that wait for admission, or
  // nullptr.
  template <typename Test>
  Handle find(Test test) const {
    for (const std::deque<Handle>* const list : {&unadmitted_, &admitted_}) {
      const auto found = std::ranges::find_if(*list, test);
      if (found != list->end()) return *found;
    }
    return nullptr;
  }

  size_t n_admitted() const { return admitted_.size(); }
  int32_t n_admitted_eager() const { return n_eager_; }
  int32_t n_unadmitted() const { return static_cast<int32_t>(unadmitted_.size()); }

 private:
  std::deque<Handle> admitted_;
  std::deque<Handle> unadmitted_;  // eager
  int32_t max_eager_ = 1 << 30;
  int32_t n_eager_ = 0;  // of the admitted
};

}  // namespace h2o
