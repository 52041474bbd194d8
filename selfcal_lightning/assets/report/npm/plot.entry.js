export { plot, line, link, rect } from "@observablehq/plot";
