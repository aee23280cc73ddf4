// Looks at the page as the browser has laid it out, and sends its height, a count of what was looked at, and every fault to the frame around.
addEventListener("load", () => {
  const faults = [];
  const say = (element, fault) => faults.push(`${place(element)}: ${fault}`);
  const place = element => {
    const section = element.closest("section")?.id, figure = element.closest("figure");
    const near = figure?.querySelector("figcaption strong")?.textContent ?? element.closest(".scroll")?.ariaLabel;
    return [section, near ?? element.tagName.toLowerCase()].filter(Boolean).join(", ");
  };
  // The picture shows the page as it opens; the check also looks at what is folded.
  const height = Math.ceil(document.body.getBoundingClientRect().bottom);
  document.querySelectorAll("details").forEach(details => (details.open = true));

  // The page is as wide as the screen, and only marked boxes scroll.
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth) say(root, `the page is ${root.scrollWidth} px wide on a screen of ${innerWidth} px`);
  for (const element of document.body.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    const scrolls = element.parentElement.closest(".scroll") || element.parentElement.closest("svg");
    if (!scrolls && box.width > 0 && (box.right > innerWidth + 1 || box.left < -1))
      say(element, `"${element.textContent.trim().slice(0, 40)}" reaches from ${box.left.toFixed()} to ${box.right.toFixed()} px`);
  }

  // Charts: axes with names and ticks, marks, and texts that stand apart, inside, and large enough.
  const apart = (a, b) => a.right <= b.left + 0.5 || b.right <= a.left + 0.5 || a.bottom <= b.top + 1.5 || b.bottom <= a.top + 1.5;
  const figures = [...document.querySelectorAll("figure")];
  let texts = 0;
  for (const figure of figures) {
    const svg = figure.querySelector(".chart > svg");
    if (!svg) { say(figure, "there is no chart"); continue; }
    const frame = svg.getBoundingClientRect();
    for (const axis of ["x", "y"]) {
      const ticks = [...svg.querySelectorAll(`.tick.${axis}`)].filter(tick => tick.textContent.trim());
      if (ticks.length < 2 && !svg.querySelector(".part")) say(svg, `axis ${axis} has ${ticks.length} ticks`);
      if (ticks.length < 1) say(svg, `axis ${axis} is empty`);
    }
    if (![...svg.querySelectorAll(".axis-name")].some(name => name.textContent.trim())) say(svg, "no axis has a name");
    const seen = element => { const box = element.getBoundingClientRect(); return box.width + box.height > 1; };
    if (![...svg.querySelectorAll(".curve, .mark, .part")].some(seen)) say(svg, "there is no mark");
    const all = [...svg.querySelectorAll("text")].map(text => ({ text, box: text.getBoundingClientRect() }));
    texts += all.length;
    all.forEach(({ text, box }, i) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
        say(svg, `"${text.textContent}" leaves the picture`);
      if (parseFloat(getComputedStyle(text).fontSize) * frame.width / svg.viewBox.baseVal.width < 9) say(svg, `"${text.textContent}" is too small`);
      for (const other of all.slice(i + 1))
        if (!apart(box, other.box)) say(svg, `"${text.textContent}" and "${other.text.textContent}" overlap`);
    });
    const legend = figure.querySelector(".legend");
    const series = new Set([...svg.querySelectorAll(".curve")].map((_, i) => i)).size;
    if (series > 0 && (legend?.querySelectorAll("li").length ?? 0) !== series) say(svg, `${series} curves have no legend of as many lines`);
    if (legend && !apart(legend.getBoundingClientRect(), frame)) say(svg, "the legend covers the chart");
  }

  // Texts stand out from what is behind them, by the ratio that WCAG 2 asks for.
  const color = text => (text.match(/[\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => {
    const linear = [r, g, b].map(c => c / 255).map(c => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const behind = element => {
    if (element.matches("text.on")) return color(getComputedStyle(element.previousElementSibling).fill);
    for (let at = element; at; at = at.parentElement) {
      const back = color(getComputedStyle(at).backgroundColor);
      if (back.length === 3 || back[3] > 0) return back;
    }
    return [255, 255, 255];
  };
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || element.matches("script, style")) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(color(element.closest("svg") ? style.fill : style.color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) say(element, `"${element.textContent.trim().slice(0, 40)}" has a contrast of ${ratio.toFixed(1)}, and 4.5 is the least`);
  }

  if (!document.querySelector("body > .verdict")) say(root, "there is no verdict");
  for (const link of document.querySelectorAll("a[href^='#']"))
    if (!document.getElementById(link.hash.slice(1))) say(link, `"${link.hash}" leads nowhere`);
  const scheme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const tables = document.querySelectorAll("table").length;
  const head = [`${height}`, `${innerWidth} px, ${scheme}`, `${figures.length} charts with ${texts} texts, ${tables} tables`];
  parent.postMessage([...head, ...faults].join("\n"), "*");
});
