// The search reads "-word" as "without word". Leave out the leading "--" of a flag that is pasted or typed.
for (const kind of ["input", "keyup"])
  document.addEventListener(kind, ({target}) => {
    if (target.matches?.("[data-md-component=search-query]") && /(^|\s)--/.test(target.value))
      target.value = target.value.replace(/(^|\s)-+/g, "$1");
  }, true);
