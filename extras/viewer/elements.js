// How the page makes its elements.
// Whatever the model or a tool wrote reaches a page through append(string) or textContent, never as HTML.
const $ = id => document.getElementById(id);

function build(node, attributes, kids) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null) node.setAttribute(name, value);
  }
  node.append(...kids.filter(kid => kid !== null));
  return node;
}
const el = (tag, attributes, ...kids) => build(document.createElement(tag), attributes, kids);
const svg = (tag, attributes, ...kids) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, kids);
