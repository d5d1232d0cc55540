// The window, used as people do: h2o_window_test MODEL.gguf BROKEN.gguf [PICTURE.png]
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
  check(window.status().contains("nowhere.gguf"), "a missing file is not named");
  check(!button->isEnabled(), "there is no model to send to");

  window.open(arguments[1]);
  check(window.status().contains("MiB"), "the cache is not described");
  QTest::keyClicks(prompt, "The old man went to the sea with his boat");
  QTest::keyClick(prompt, Qt::Key_Return);
  check(window.is_streaming(), "Enter does not send");
  check(!prompt->isEnabled() && button->text() == "Stop", "it does not show that it streams");
  wait(window);
  const QString first = text->toPlainText();
  check(first.startsWith("The old man") && first.size() > 100, "no text");
  check(!kept->positions().empty(), "what is kept is not shown");
  if (arguments.size() > 3) check(window.grab().save(arguments[3]), "no picture");

  window.open(arguments[2]);
  check(window.status().contains("gguf"), "a broken file is not named");
  check(text->toPlainText() == first, "the text of the model that is open is lost");

  window.open(arguments[1]);  // again, for room
  QTest::keyClicks(prompt, "The");
  QTest::keyClick(prompt, Qt::Key_Return);
  QTest::mouseClick(button, Qt::LeftButton);
  wait(window);
  check(window.status().contains("tokens"), "what was stopped is not summed up");

  QTest::keyClicks(prompt, " and");
  QTest::keyClick(prompt, Qt::Key_Return);
  window.close();  // while it streams
  return 0;
}
