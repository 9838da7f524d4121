// Scales of the axes, their ticks, smoothing, and the search for a point.

/** Maps values to pixels and back, linearly or by the logarithm. */
class Scale {
  constructor(low, high, from, to, log) {
    this.log = log;
    this.low = log ? Math.log10(low) : low;
    this.high = log ? Math.log10(high) : high;
    if (this.high === this.low) {
      const margin = log ? 0.1 : Math.abs(this.low) * 0.05 || 0.5;
      this.low -= margin;
      this.high += margin;
    }
    this.from = from;
    this.factor = (to - from) / (this.high - this.low);
  }

  pixel(value) {
    return this.from + ((this.log ? Math.log10(value) : value) - this.low) * this.factor;
  }

  value(pixel) {
    const position = this.low + (pixel - this.from) / this.factor;
    return this.log ? 10 ** position : position;
  }

  /** Round values, or round multiples of `unit`. */
  ticks(count, unit = 1) {
    return this.log ? logTicks(this.low, this.high, count)
      : linearTicks(this.low / unit, this.high / unit, count).map((tick) => tick * unit);
  }
}

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9 && ticks.length < 50; index++) {
    ticks.push(Number((index * step).toPrecision(12)));
  }
  return ticks;
}

/** Ticks at powers of ten, with 2 and 5 between them if there are few. `low` and `high` are logarithms. */
function logTicks(low, high, count) {
  if (high - low < 0.7) {
    return linearTicks(10 ** low, 10 ** high, count).filter((tick) => tick > 0);
  }
  const every = Math.max(1, Math.ceil((high - low) / count)), ticks = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
    for (const factor of high - low < 3 ? [1, 2, 5] : [1]) {
      const position = power + Math.log10(factor);
      if (power % every === 0 && position >= low - 1e-9 && position <= high + 1e-9) ticks.push(factor * 10 ** power);
    }
  }
  return ticks;
}

/** Exponential moving average without the bias of its start; missing values are left out. */
function smooth(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

/** Index of the point whose x is nearest to `x`; `xs` increases, and may contain null. -1 if there is none. */
function nearest(xs, x) {
  let low = 0, high = xs.length - 1, best = -1;
  while (low <= high) {
    let middle = (low + high) >> 1;
    const probe = middle;
    while (middle <= high && !isNumber(xs[middle])) middle++;
    if (middle > high) {
      high = probe - 1;
      continue;
    }
    if (best < 0 || Math.abs(xs[middle] - x) < Math.abs(xs[best] - x)) best = middle;
    if (xs[middle] < x) low = middle + 1;
    else high = probe - 1;
  }
  return best;
}

/** `ys` at the position `x` of `xs`, which increases, by linear interpolation; null outside and without values. */
function interpolate(xs, ys, x) {
  const index = nearest(xs, x);
  if (index < 0) return null;
  const other = xs[index] < x ? index + 1 : xs[index] > x ? index - 1 : index;
  if (!isNumber(ys[index]) || other === index) return ys[index] ?? null;
  if (!isNumber(xs[other]) || !isNumber(ys[other])) return ys[index];
  return ys[index] + (ys[other] - ys[index]) * (x - xs[index]) / (xs[other] - xs[index]);
}

/** The values at two fractions of the sorted list. */
function quantiles(values, low, high) {
  const sorted = Float64Array.from(values).sort(), last = sorted.length - 1;
  return [sorted[Math.round(low * last)], sorted[Math.round(high * last)]];
}
