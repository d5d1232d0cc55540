// Keeps the end of a text in view while it grows, until the reader scrolls up.

const NEAR = 8; // px

export class Follow {
  constructor(target, button) {
    this.target = target;
    this.button = button;
    this.isOn = true;
    this.top = 0;
    target.addEventListener("scroll", () => this.scrolled(), { passive: true });
    target.addEventListener("wheel", ({ deltaY }) => {
      if (deltaY < 0 && target.scrollHeight > target.clientHeight) this.isOn = false;
    }, { passive: true });
    button.addEventListener("click", () => {
      this.isOn = true;
      this.toEnd();
      target.focus({ preventScroll: true });
    });
    // Fonts, formulas and the size of the window change the height, too.
    this.observer = new ResizeObserver(() => this.toEnd());
    this.observer.observe(target);
  }

  get below() {
    return this.target.scrollHeight - this.target.scrollTop - this.target.clientHeight;
  }

  // Text that grows moves the end away without moving the reader.
  scrolled() {
    const { scrollTop } = this.target;
    if (this.below <= NEAR) this.isOn = true;
    else if (scrollTop < this.top - 1) this.isOn = false;
    this.top = scrollTop;
    this.showButton();
  }

  toEnd() {
    if (this.isOn) {
      this.target.scrollTop = this.target.scrollHeight;
      this.top = this.target.scrollTop;
    }
    this.showButton();
  }

  showButton() {
    this.button.hidden = this.isOn || this.below < 40;
  }

  // What grows within the target.
  watch(content) {
    this.observer.disconnect();
    this.observer.observe(this.target);
    this.observer.observe(content);
  }
}
