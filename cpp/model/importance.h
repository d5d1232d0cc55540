// ImportanceMatrix: how much each input of a model's matrices contributes, as in llama.cpp; guides
// quantization.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "model/model.h"

namespace h2o {

// Statistics of one tensor, which holds one matrix or those of all experts.
struct InputSums {
  std::string name;             // as in the file: "blk.0.attn_q.weight"
  int64_t n_cols;               // columns of a matrix: elements of its input
  std::vector<double> squares;  // [matrices, n_cols] sums of the squared inputs
  std::vector<int64_t> counts;  // [matrices] number of inputs summed
};

// Accumulates the inputs of every matrix except those of the embedding and the output, for all
// passes of the model between construction and end(). Only one per model at a time. Throws
// InvalidArgument if the back end does not support observe().
class ImportanceMatrix {
 public:
  explicit ImportanceMatrix(std::shared_ptr<Model> model);
  ~ImportanceMatrix() { end(); }
  ImportanceMatrix(const ImportanceMatrix&) = delete;
  ImportanceMatrix& operator=(const ImportanceMatrix&) = delete;

  void end();

  // Sums in layer order. Must not be called while the model computes.
  const std::vector<InputSums>& sums() const { return sums_; }

 private:
  struct Place {  // of a matrix in sums_
    size_t tensor;
    int64_t matrix;
  };

  void follow(const std::string& name, const Tensor& weight, int64_t n_matrices);
  void add(const Tensor& weight, const Tensor& x);

  std::shared_ptr<Model> model_;
  std::vector<InputSums> sums_;
  std::unordered_map<const std::byte*, Place> places_;  // by the matrix's address
};

}  // namespace h2o
