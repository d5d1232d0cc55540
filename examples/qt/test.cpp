// Tests the window by simulated input: h2o_window_test MODEL.gguf BROKEN.gguf [SCREENSHOT.png]
#include <QApplication>
#include <QLineEdit>
#include <QPlainTextEdit>
#include <QPushButton>
#include <QTest>
#include <cstdio>
#include <cstdlib>

#include "window.h"

namespace {

void check(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

void wait(const Window& window) {
  while (window.is_streaming()) QCoreApplication::processEvents(QEventLoop::WaitForMoreEvents);
}

}  // namespace

int main(int argc, char** argv) {
  QApplication app(argc, argv);
  const QStringList arguments = app.arguments();
  check(arguments.size() >= 3, "expected two files");
  Window window;
  window.show();
  auto* text = window.findChild<QPlainTextEdit*>();
  auto* prompt = window.findChild<QLineEdit*>();
  auto* button = window.findChild<QPushButton*>();
  auto* kept = static_cast<KeptBar*>(window.centralWidget()->findChild<QWidget*>("kept"));

  window.open("nowhere.gguf");
  check(window.status().contains("nowhere.gguf"), "the error does not name the missing file");
  check(!button->isEnabled(), "the button is enabled without a model");

  window.open(arguments[1]);
  check(window.status().contains("MiB"), "the status has no cache size");
  QTest::keyClicks(prompt, "The old man went to the sea with his boat");
  QTest::keyClick(prompt, Qt::Key_Return);
  check(window.is_streaming(), "Enter does not start the generation");
  check(!prompt->isEnabled() && button->text() == "Stop", "the window does not show the stream");
  wait(window);
  const QString first = text->toPlainText();
  check(first.startsWith("The old man") && first.size() > 100, "no output");
  check(!kept->positions().empty(), "kept tokens are not shown");
  if (arguments.size() > 3) check(window.grab().save(arguments[3]), "the screenshot is not saved");

  window.open(arguments[2]);
  check(window.status().contains("gguf"), "the error does not name the broken file");
  check(text->toPlainText() == first, "a failed open cleared the text");

  window.open(arguments[1]);  // a new session with an empty cache
  QTest::keyClicks(prompt, "The");
  QTest::keyClick(prompt, Qt::Key_Return);
  QTest::mouseClick(button, Qt::LeftButton);
  wait(window);
  check(window.status().contains("tokens"), "no summary after Stop");

  QTest::keyClicks(prompt, " and");
  QTest::keyClick(prompt, Qt::Key_Return);
  window.close();  // during the stream
  return 0;
}
