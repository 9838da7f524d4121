// Flags are not broken after "--"; long keys of tables are, after dots and underscores: otherwise they hide other columns.
for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
  code.classList.toggle("unbroken", code.textContent.length <= 30);
  if (code.closest("td") && code.textContent.length > 36) {
    code.classList.add("long");
    code.innerHTML = code.innerHTML.replace(/[._](?=\w)/g, "$&<wbr>");
  }
}
