// h2o_window [MODEL.gguf]
#include <QApplication>

#include "window.h"

int main(int argc, char** argv) {
  QApplication app(argc, argv);
  Window window;
  window.show();
  if (app.arguments().size() > 1) window.open(app.arguments()[1]);
  return app.exec();
}
