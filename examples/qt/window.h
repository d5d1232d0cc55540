// A window that continues a text and shows which of its tokens the cache keeps.
#pragma once

#include <QMainWindow>
#include <QString>
#include <h2o.hpp>
#include <memory>
#include <thread>
#include <vector>

class QLabel;
class QLineEdit;
class QPlainTextEdit;
class QPushButton;

// A bar with one column per token of the sequence; kept ones are highlighted.
class KeptBar : public QWidget {
 public:
  explicit KeptBar(QWidget* parent);
  void show_kept(std::vector<int32_t> positions, int32_t n_tokens);
  const std::vector<int32_t>& positions() const { return positions_; }

 protected:
  void paintEvent(QPaintEvent* event) override;

 private:
  std::vector<int32_t> positions_;
  int32_t n_tokens_ = 0;
};

class Window : public QMainWindow {
 public:
  Window();
  ~Window() override;

  // Opens a model. On failure the current one stays open, and status() is the error.
  void open(const QString& path);
  void send();
  void stop();
  bool is_streaming() const { return thread_.joinable(); }
  QString status() const;

 protected:
  void closeEvent(QCloseEvent* event) override;

 private:
  void show_state(bool is_streaming);
  void finish(const QString& status);

  std::unique_ptr<h2o::api::Session> session_;  // owns what it needs of its model
  std::thread thread_;                          // of the active stream
  QPlainTextEdit* text_;
  QLineEdit* prompt_;
  QPushButton* button_;
  KeptBar* kept_;
  QLabel* status_;
};
