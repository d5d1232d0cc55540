#include "window.h"

#include <QAction>
#include <QCloseEvent>
#include <QFileDialog>
#include <QFileInfo>
#include <QHBoxLayout>
#include <QLabel>
#include <QLineEdit>
#include <QMenuBar>
#include <QPainter>
#include <QPlainTextEdit>
#include <QPushButton>
#include <QVBoxLayout>

namespace {

constexpr double kBudget = 0.1;      // fraction of the context
constexpr int32_t kMaxTokens = 300;  // per output

QString message_of(const std::exception& error) { return QString::fromUtf8(error.what()); }

}  // namespace

KeptBar::KeptBar(QWidget* parent) : QWidget(parent) {
  setObjectName("kept");
  setFixedHeight(28);
  setAccessibleName("Tokens that the cache keeps");
}

void KeptBar::show_kept(std::vector<int32_t> positions, int32_t n_tokens) {
  positions_ = std::move(positions);
  n_tokens_ = n_tokens;
  setToolTip(QString("%1 of %2 tokens are kept").arg(positions_.size()).arg(n_tokens_));
  update();
}

void KeptBar::paintEvent(QPaintEvent*) {
  QPainter painter(this);
  painter.fillRect(rect(), palette().base());
  const double step = static_cast<double>(width()) / std::max(n_tokens_, 1);
  for (const int32_t at : positions_) {
    painter.fillRect(QRectF(at * step, 0, std::max(step, 1.0), height()), palette().highlight());
  }
}

Window::Window() {
  setWindowTitle("h2o");
  resize(720, 480);
  auto* central = new QWidget(this);
  text_ = new QPlainTextEdit(central);
  text_->setReadOnly(true);
  prompt_ = new QLineEdit(central);
  prompt_->setPlaceholderText("Text to continue, or nothing to generate more");
  button_ = new QPushButton(central);
  kept_ = new KeptBar(central);
  status_ = new QLabel("Open a model with Ctrl+O", central);
  status_->setWordWrap(true);

  auto* row = new QHBoxLayout;
  row->addWidget(prompt_);
  row->addWidget(button_);
  auto* column = new QVBoxLayout(central);
  column->addWidget(text_);
  column->addWidget(kept_);
  column->addLayout(row);
  column->addWidget(status_);
  setCentralWidget(central);

  connect(prompt_, &QLineEdit::returnPressed, this, &Window::send);
  connect(button_, &QPushButton::clicked, this, [this] { is_streaming() ? stop() : send(); });
  QMenu* menu = menuBar()->addMenu("&File");
  const auto choose = [this] {
    const QString path = QFileDialog::getOpenFileName(this, "Open a model", "", "GGUF (*.gguf)");
    if (!path.isEmpty()) open(path);
  };
  const auto add = [&](const char* name, QKeySequence keys, auto action) {
    QAction* item = menu->addAction(name);
    item->setShortcut(keys);
    connect(item, &QAction::triggered, this, action);
  };
  add("&Open...", QKeySequence::Open, choose);
  add("&Stop", Qt::Key_Escape, [this] { stop(); });
  add("&Quit", QKeySequence::Quit, [this] { close(); });
  show_state(false);
}

Window::~Window() {
  stop();
  if (thread_.joinable()) thread_.join();
}

QString Window::status() const { return status_->text(); }

void Window::open(const QString& path) {
  if (is_streaming()) return;
  try {
    const h2o::api::Model model(path.toUtf8().toStdString());
    h2o_session_options options = H2O_SESSION_OPTIONS;
    options.hh = kBudget;
    session_ = std::make_unique<h2o::api::Session>(model, options);
  } catch (const std::exception& error) {
    status_->setText(message_of(error));
    return;
  }
  const h2o_session_stats stats = session_->stats();
  text_->clear();
  kept_->show_kept({}, 0);
  status_->setText(QString("%1: a cache of %2 MiB instead of %3")
                       .arg(QFileInfo(path).fileName())
                       .arg(stats.cache_bytes / 1048576.0, 0, 'f', 1)
                       .arg(stats.full_cache_bytes / 1048576.0, 0, 'f', 1));
  show_state(false);
}

// Generates in a separate thread, which posts pieces to the window's event loop.
void Window::send() {
  if (session_ == nullptr || is_streaming()) return;
  const QString prompt = prompt_->text();
  prompt_->clear();
  text_->moveCursor(QTextCursor::End);
  text_->insertPlainText(prompt);
  show_state(true);
  session_->clear_cancel();  // of a stop() just after the last stream ended
  thread_ = std::thread([this, bytes = prompt.toUtf8().toStdString()] {
    QString status;
    try {
      h2o_stream_options options = H2O_STREAM_OPTIONS;
      options.max_tokens = kMaxTokens;
      const auto on_piece = [this](std::string_view piece) {
        const QString text = QString::fromUtf8(piece.data(), static_cast<qsizetype>(piece.size()));
        // The session allows both calls in the callback.
        std::vector<int32_t> kept = session_->kept(0, 0);
        const int32_t n_tokens = session_->stats().n_tokens;
        QMetaObject::invokeMethod(this, [this, text, kept = std::move(kept), n_tokens] {
          text_->moveCursor(QTextCursor::End);
          text_->insertPlainText(text);
          kept_->show_kept(kept, n_tokens);
        });
        return true;
      };
      const h2o_generation generation = session_->stream(bytes, on_piece, options);
      const h2o_session_stats stats = session_->stats();
      status = QString("%1 tokens, of which %2 are kept").arg(stats.n_tokens).arg(stats.n_kept);
      if (generation.n_generated > 1) {
        status += QString("; %1 tokens per second")
                      .arg((generation.n_generated - 1) / generation.decode_seconds, 0, 'f', 0);
      }
    } catch (const std::exception& error) {
      status = message_of(error);
    }
    QMetaObject::invokeMethod(this, [this, status] { finish(status); });
  });
}

void Window::stop() {
  if (is_streaming()) session_->cancel();
}

void Window::finish(const QString& status) {
  thread_.join();
  status_->setText(status);
  show_state(false);
}

void Window::show_state(bool is_streaming) {
  button_->setText(is_streaming ? "Stop" : "Send");
  button_->setEnabled(session_ != nullptr);
  prompt_->setEnabled(session_ != nullptr && !is_streaming);
  if (!is_streaming) prompt_->setFocus();
}

void Window::closeEvent(QCloseEvent* event) {
  stop();  // the destructor waits for the thread
  event->accept();
}
