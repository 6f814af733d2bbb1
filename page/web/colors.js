// Colours of requests, and of gaps by their length. Read next: lanes.js.

const SHADES = 16;  // of gaps within the SLO
const YELLOW = [0xf2, 0xd5, 0x3c];

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const is_dark = () => document.documentElement.dataset.theme === "dark";
/** The hue of a request in lists and in the cache: from orange to violet, never a stall's red. */
const hue_of = id => 30 + (id * 173.05) % 280;  // neighbours differ: the golden section of 280
const color_of = id => `hsl(${hue_of(id)} 55% ${is_dark() ? 62 : 45}%)`;

/** The colours of a theme. Gaps are green up to a tenth of the SLO, then turn yellow on a
 * logarithmic scale, and are red above it, as in lab/pictures/timelines.py. */
class Palette {
  constructor() {
    for (const name of ["wait", "prefill", "hybrid", "decode", "stall", "ink", "soft",
      "line", "accent", "back", "free"]) this[name] = css(`--${name}`);
    const green = [1, 3, 5].map(i => parseInt(this.decode.slice(i, i + 2), 16));
    this.shades = Array.from({length: SHADES}, (_, shade) => {
      const share = shade / (SHADES - 1);
      const rgb = green.map((value, i) => Math.round(value + share * (YELLOW[i] - value)));
      return `rgb(${rgb.join(" ")})`;
    });
  }
  gap(seconds) {
    if (seconds > SLO) return this.stall;
    const share = SLO < Infinity ? 1 + Math.log10(Math.max(seconds / SLO, 0.1)) : 0;
    return this.shades[Math.round(share * (SHADES - 1))];
  }
}
let palette = null;  // of the theme that is shown
